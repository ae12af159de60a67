"""Programs that query stages and their servers, or run in their units."""
