"""Scenarios and policies that users write into files; docs/scenario-files.md shows one.

disk reads and writes whole files, documents gives each value its line, schema makes scenarios and
policies from plain data, settings changes values by their names, and studies puts it together.
"""

from tarry.simulator.files.studies import compare_files, is_scenario, read_defence, read_study

__all__ = ["compare_files", "is_scenario", "read_defence", "read_study"]
