"""Where this file is, the tests below can import `models`, `programs` and `reports`."""
