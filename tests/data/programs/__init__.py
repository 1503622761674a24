"""Programs that the survival tests run as processes of their own."""
