-- ARGV: worker id, incarnation, alive_ms, whether it was in before, then fields and values of the node's hash. Returns 0
-- if superseded.
local id, incarnation = ARGV[1], ARGV[2]
local node = key('node', id)
if redis.call('SISMEMBER', key('node', id, 'old'), incarnation) == 1 then return 0 end
-- One that slept until it was forgotten does not take the place of the one that lives there since.
local alive = redis.call('GET', key('node', id, 'alive'))
if ARGV[4] == '1' and alive and alive ~= incarnation then return 0 end
local former = redis.call('HGET', node, 'incarnation')
if former and former ~= incarnation then
  redis.call('SADD', key('node', id, 'old'), former)
  redis.call('EXPIRE', key('node', id, 'old'), 3600)
end
redis.call('DEL', node, key('node', id, 'prefixes'))
redis.call('HSET', node, 'term', redis.call('INCR', key('terms')), unpack(ARGV, 5))
redis.call('ZADD', key('nodes'), 0, id)
redis.call('SET', key('node', id, 'alive'), incarnation, 'PX', ARGV[3])
return 1
