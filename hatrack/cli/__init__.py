"""The command line, built with click: one file per command, each imported when it is used."""

from hatrack.cli.group import main as main
