--! uses records
-- Makes a small write, and returns the time.

call('HSET', base .. 'meta', 'pinged', now)
return now
