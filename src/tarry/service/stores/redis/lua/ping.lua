--! uses records
-- Makes a small write.
--
-- reply:   now

call('HSET', base .. 'meta', 'pinged', now)
return now
