"""`python -m rolemesh.launch`: the command line without the console script."""

from rolemesh.launch.cli import main

main()
