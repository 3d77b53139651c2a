"""Code that the client adapters share: headers, retries, one downstream per origin, hand-off."""
