"""pFedLA: personalized federated learning with layer-wise aggregation."""
