"""Pictures and pages of results; a page is one HTML file that needs no network."""
