"""What a rank saves and resumes: position, generators, buffers."""
