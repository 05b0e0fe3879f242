"""One page about one run or several: facts (`report_facts.py`, `gather.py`) apart from their drawing (`page.py`)."""
