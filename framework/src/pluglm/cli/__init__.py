"""The `pluglm` command. Everything heavy is imported inside a command, so that listing plugins stays light."""
