"""The processes of a job on Ray: what runs tasks in them, who keeps them, finds them anew, and gives them up."""
