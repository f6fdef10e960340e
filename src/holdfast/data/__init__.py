"""Reading, rendering, splitting and streaming examples."""
