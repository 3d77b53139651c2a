"""Code that the client adapters share: sending, headers, downstreams by origin, the hand-off."""
