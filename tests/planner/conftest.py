"""Where this file is, the tests below can import `planned_programs`."""
