"""The unit-step model of Sorted-F (papers.md §2): one token a step, exact memory, mean completion time."""
