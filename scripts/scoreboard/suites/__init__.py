"""The suites, a file for each. The docstring of the package above says how to write one."""
