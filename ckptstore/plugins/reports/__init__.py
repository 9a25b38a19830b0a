"""What a store holds, what that takes, what a policy would free, and what its place can do."""
