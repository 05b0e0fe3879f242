"""The user's code of a run: what it is, its copy in the run's directory, and the packages of the submission."""
