"""From a budget to a plan: what a plan costs, and how to spend a budget best."""
