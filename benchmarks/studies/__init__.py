"""The studies, a file per table: what is compared, how it is trained, what is drawn."""
