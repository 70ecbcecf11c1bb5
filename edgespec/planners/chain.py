"""A chain of the draft's best next tokens, the classical method (Leviathan et al., arXiv 2211.17192).

It is the search of `specexec.py` with one child of each node.
"""

from edgespec.planners.specexec import SpecExecPlanner


class ChainPlanner(SpecExecPlanner):
    name = "chain"
    children = 1
    enough = 0.0
    usual_depth = 16
