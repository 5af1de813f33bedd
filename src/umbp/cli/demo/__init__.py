"""`umbp demo`: a real engine loses a long document and gets it back."""
