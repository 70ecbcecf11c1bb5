"""One sequence: propose a tree, one pass over it, verify, accept. The contracts of an engine and of a planner."""
