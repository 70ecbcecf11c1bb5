"""A chain of the draft's best tokens (Leviathan et al., arXiv 2211.17192): SpecExec with one child of each node."""

from edgespec.planners.specexec import SpecExecPlanner


class ChainPlanner(SpecExecPlanner):
    name = "chain"
    children = 1
    enough = 0.0
    usual_depth = 16
