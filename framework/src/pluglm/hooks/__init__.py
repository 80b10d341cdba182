"""Hook plugins that come with the framework."""
