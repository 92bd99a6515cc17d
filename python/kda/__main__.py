"""`python -m kda`: the command line."""

from kda.cli import main

main()
