-- ARGV: worker id, incarnation, alive_ms, whether it was in before, then fields and values of the node's hash. Returns 0
-- if another lives there, 2 if it took the place of one that lives, else 1.
local id, incarnation = ARGV[1], ARGV[2]
local node = key('node', id)
local alive = redis.call('GET', key('node', id, 'alive'))
local is_taken = alive and alive ~= incarnation
-- One that slept until it was forgotten does not take the place of the one that lives there since.
if is_taken and ARGV[4] == '1' then return 0 end
local known = redis.call('HMGET', node, 'incarnation', 'term')
-- The call came twice, perhaps: what was placed here in between stays counted.
if known[1] ~= incarnation or known[2] == '0' then
  redis.call('DEL', node, key('node', id, 'prefixes'))
  redis.call('HSET', node, 'term', redis.call('INCR', key('terms')), unpack(ARGV, 5))
  redis.call('ZADD', key('nodes'), 0, id)
end
redis.call('SET', key('node', id, 'alive'), incarnation, 'PX', ARGV[3])
return is_taken and 2 or 1
