"""Reading and showing run folders. docs/runs.md describes their format."""
