"""One sequence from the draft model: the classical baseline (Leviathan et al., arXiv 2211.17192).

Each draft pass adds the draft's best next token, coupled to the target's noise as in `specexec.py`: its search with one
child of each node, as deep as it may be, unless pass times say that this does not pay.
"""

from edgespec.planners.specexec import SpecExecPlanner


class ChainPlanner(SpecExecPlanner):
    """A tree without branches."""

    name = "chain"
    children = 1
    enough = 0.0
    usual_depth = 16
