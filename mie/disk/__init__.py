"""Keep the full blocks of the prefix cache in files, so that they survive the process."""
