"""The `medusa` command: thin subcommands over the library, one module each."""
