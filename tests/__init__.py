"""The test suite: see CONTRIBUTING.md for what the folders mean."""
