"""One sequence (propose a tree, one pass over it, verify, accept), and the contracts of engines and planners."""
