"""A pool of sandboxes on another machine, or in another process: `serve_pool` lends one out, `RemotePool` uses it."""
