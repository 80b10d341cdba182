"""An outside plugin for pluglm, complete with its entry point and contract test."""
