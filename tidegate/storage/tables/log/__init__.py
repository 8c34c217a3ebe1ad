"""The log of an output table: its entries and their fold, what a job may claim, versions, vacuums and cuts."""
