"""What the HTTP adapters share: sending with retries, headers, origins, the hand-off."""
