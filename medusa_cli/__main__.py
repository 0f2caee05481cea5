"""`python -m medusa_cli` is `medusa`."""

from medusa_cli.app import main

if __name__ == "__main__":
    main()
