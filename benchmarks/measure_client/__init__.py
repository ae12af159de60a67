"""What does a request cost the load client, and when is it late itself? guidellm beside it."""
