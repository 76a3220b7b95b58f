"""Evidence on accuracy: trained models, chosen bits, predicted gradient errors."""
