"""Trees of drafts: the other ways on that a proposal names, verified in the same step as sequences that live for it."""
