"""One page about one run or several: facts (`report_facts.py`, `gather.py`) apart from how they are drawn
(`page.py`).
"""
