"""The dashboard that the service serves at `/`: plain HTML, CSS and JavaScript modules."""
