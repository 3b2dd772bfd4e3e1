-- ARGV: worker id, incarnation, alive_ms, whether it was in before, then fields and values of the node's hash. Returns 0
-- if another lives there, 2 if it took the place of one that lives, else 1.
local id, incarnation = ARGV[1], ARGV[2]
local node = key('node:', id)
local known = redis.call('HMGET', node, 'incarnation', 'term', 'until')
local is_taken = known[1] and known[1] ~= incarnation and tonumber(known[3]) > NOW_MS
-- One that slept until it was forgotten does not take the place of the one that lives there since.
if is_taken and ARGV[4] == '1' then return 0 end
-- The call came twice, perhaps: what was placed here in between stays counted.
if known[1] ~= incarnation or known[2] == '0' then
  -- Never one that was given before, though Redis have lost which these were.
  redis.call('SET', key('terms'), NOW_MS, 'NX')
  redis.call('DEL', node)
  redis.call('HSET', node, 'term', redis.call('INCR', key('terms')), 'joined', NOW_US, unpack(ARGV, 5))
  redis.call('ZADD', key('nodes'), 0, id)
end
redis.call('HSET', node, 'until', NOW_MS + ARGV[3])
touch(id)
return is_taken and 2 or 1
