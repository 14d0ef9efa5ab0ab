"""What the tests of every package share: cases, error budgets, and compilation without a GPU."""
