"""Where this file is, the tests below can import `models`, `plans`, `programs` and `reports`."""
