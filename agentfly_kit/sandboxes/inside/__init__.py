"""Programs that run inside a sandbox. They use only the standard library and are sent in as text or bytecode."""
