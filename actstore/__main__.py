"""`python -m actstore`: the command line."""

from actstore.cli.app import main

if __name__ == "__main__":
    main()
