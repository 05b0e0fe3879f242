"""What commands print: tables, bars, the story of a run."""
