"""One page about one run or several: its facts (`facts.py`, `gather.py`) apart from how they are drawn (`page.py`)."""
