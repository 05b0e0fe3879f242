"""The state that a rank saves and resumes: position, generators, buffers."""
