"""Scenario files and policy files that users write; docs/scenario-files.md shows one.

`documents` reads files and records line numbers, `schema` builds scenarios and defences from their
data, `parameters` lists and changes values by name, and `studies` turns files into studies.
"""

from tarry.simulator.files.studies import compare_files, is_scenario, read_defence, read_study

__all__ = ["compare_files", "is_scenario", "read_defence", "read_study"]
